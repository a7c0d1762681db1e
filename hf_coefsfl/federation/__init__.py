"""Clients, their data, and the rounds in which they train."""
