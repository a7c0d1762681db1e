"""Measuring: staleness, operations, bytes, memory; tables and plots."""
