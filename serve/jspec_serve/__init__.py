"""Serving targets with drafters: admission, engine, HTTP."""
