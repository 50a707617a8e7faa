"""Docker hosts: their addresses, the clients that call them, the labels we put on things there, and the translation of their errors."""
