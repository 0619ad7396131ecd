"""Made after the model is loaded; called before each forward pass."""


class NgramEmbeddingManager:
    def __init__(self, engram_hasher):
        self.engram_hasher = engram_hasher

    @classmethod
    def from_model(cls, *, model, model_config, req_to_token_pool, max_running_requests, device):
        from sglang.srt.layers.engram import EngramHasher

        for module in model.modules():
            if isinstance(module, EngramHasher):
                module.init_history(req_to_token_pool.req_to_token.shape[0], device)
                return cls(module)
        return cls(None)

    def prepare_for_forward(self, batch, *, chunked_req):
        return batch
