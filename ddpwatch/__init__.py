"""Watch a PyTorch DistributedDataParallel job while it runs. Importing this package imports nothing."""

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from ddpwatch.version import VERSION

        return VERSION
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
