"""One process per engine and model; each answers the requests of protocol.py."""
