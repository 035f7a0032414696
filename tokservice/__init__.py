"""tokservice: a multiprocess LLM serving system whose HTTP event loop never computes."""

__version__ = "0.1.0"
