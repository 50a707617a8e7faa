"""The serving processes: SGLang engines and the router in front of them."""
