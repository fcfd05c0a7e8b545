"""Small things of deepspeed.utils that loops use: RepeatingLoader, its log."""
import logging

logger = logging.getLogger("DeepSpeed")


def log_dist(message, ranks=None, level=logging.INFO):
    """Of rank 0."""
    if not ranks or ranks[0] == -1 or 0 in ranks:
        logger.log(level, f"[Rank 0] {message}")


class RepeatingLoader:
    """A loader that begins anew after its last batch."""

    def __init__(self, loader):
        self.loader, self._data = loader, iter(loader)

    def __iter__(self):
        return self

    def __len__(self):
        return len(self.loader)

    def __next__(self):
        try:
            return next(self._data)
        except StopIteration:
            self._data = iter(self.loader)
            return next(self._data)
