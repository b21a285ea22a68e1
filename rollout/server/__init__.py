"""A replica behind HTTP: the control plane users of vLLM and SGLang know, and OpenAI's generation.

``app.py`` puts it together, ``control.py`` and ``weights.py`` are the control endpoints,
``generation.py`` those that make tokens, ``running.py`` runs it until it is told to end. Needs the
extra ``server``.
"""
