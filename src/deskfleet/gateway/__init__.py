"""The HTTP service in front of a `TokenEngine`: OpenAI's and Anthropic's protocols, whatever engine stands behind it.

Owns HTTP, the protocols, and what clients are told when something is wrong. Knows nothing of tensors, ranks or
processes: it moves token ids through `deskfleet.endpoint`.

The path of a token: `app.generate` -> `stream.stream_answer` -> a policy's watchers -> `protocol.AnswerParser.push`.
"""
