"""Engines that run elsewhere and are talked to over HTTP, each a `TokenEngine` with token ids in and out.

    Router ── prefix-aware choice, failover, circuit breakers
      ├── VllmUpstream ──┐
      └── SglangUpstream ┴─ HttpUpstream: checks, thoughts, deadlines, silence ── Connection: HTTP and events

Knows nothing of protocols or prompts. What each engine is sent and how it answers: docs/reference/upstreams.md.
"""
