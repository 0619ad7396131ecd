"""Where a step's tokens are looked at."""


class Scheduler:
    def __init__(self):
        self.answered = []

    def process_batch_result(self, batch, result):
        self.answered.append(result)
