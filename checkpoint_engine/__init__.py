"""How weights get from a trainer to rollout engines."""

if __name__ == "checkpoint_engine":
    raise ImportError(
        "this folder is hotbunk.checkpoint_engine; the bare name is another project's package"
    )
