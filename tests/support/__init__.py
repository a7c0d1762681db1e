"""What tests share: tiny models and data, stand-ins for the Hub and for a network of clients."""
