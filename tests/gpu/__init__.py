"""Measurements that need a GPU; not collected by pytest. See :mod:`tests.gpu.__main__`."""
