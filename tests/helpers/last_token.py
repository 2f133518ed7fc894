"""A fallback of a user's own."""


class LastToken:
    """Proposes the last token again, twice."""

    asked = 0

    def propose(self, input_ids, lookahead):
        self.asked += 1
        assert input_ids.shape[0] == 1 and not (input_ids == 0).all()
        return input_ids[:, -1:].repeat(1, 2), None
