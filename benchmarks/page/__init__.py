"""Measurements of the pages modules."""
