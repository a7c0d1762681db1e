"""The app of the server: `hf_coefsfl.flower.server_app`."""

from hf_coefsfl.flower import server_app as app

__all__ = ["app"]
