"""Tools that tests in several folders share."""
