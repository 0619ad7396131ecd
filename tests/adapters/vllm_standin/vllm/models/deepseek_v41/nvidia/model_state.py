"""What the runner tells the model of requests and steps."""


class DeepseekV41ModelState:
    def __init__(self, vllm_config, model, encoder_cache, device):
        self.model, self.seen = model, []

    def add_request(self, req_index, new_req_data):
        self.seen.append(req_index)

    def prepare_inputs(self, input_batch, req_states):
        return {"lookback_token_ids": None}
