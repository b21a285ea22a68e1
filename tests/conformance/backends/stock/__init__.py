"""Servers that stand alone, without an adapter of ours in front: what they do is what is tried.

``surface`` finds out what answers at a URL; a *dialect* (``vllm``, ``sglang``) knows its routes and
payloads and nothing else; ``asking`` sends them; ``bare`` has the verbs that cases call and keeps no
rule itself; ``described`` is the description.
"""
