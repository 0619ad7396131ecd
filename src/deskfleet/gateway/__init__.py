"""The OpenAI-compatible HTTP service in front of a `TokenEngine`.

Owns HTTP, the protocol, and what clients are told when something is wrong. Knows nothing of tensors, ranks or
processes: it moves token ids through `deskfleet.endpoint`.

The path of a token: `app.chat_completions` -> `stream.stream_answer` -> `protocol.AnswerParser.push`.
"""
