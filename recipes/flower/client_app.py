"""The app of each client: `hf_coefsfl.flower.client_app`."""

from hf_coefsfl.flower import client_app as app

__all__ = ["app"]
