"""The dashboard at /ui: a page, its script and style, and the JSON that it asks for every second.

No framework, no build, nothing from another host: what is in `static/` is what the browser gets.
"""
