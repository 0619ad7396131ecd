"""A stand-in with SGLang's seams: enough for the plug-in to be loaded, hooked, proven and asked, in seconds."""

__version__ = "0.5.23"
