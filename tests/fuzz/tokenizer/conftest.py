from tests.helpers.own_cache import own_cache

__all__ = ["own_cache"]
