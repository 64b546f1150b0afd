"""`sites`: equal shares of a data set; at every second site the two states are called the other way round."""

import numpy as np

from coterie.data import Client, Dataset, Federation, Records


def sites(dataset: Dataset, seed: int, *, clients: int = 6, held_out: float = 0.25) -> Federation:
    """Deal the records in an order that depends on the seed alone, and hold out a share of each client's."""
    order = np.random.default_rng(seed).permutation(len(dataset.train))
    dealt = []
    for number, mine in enumerate(np.array_split(order, clients)):
        flipped = (dataset.train.targets[mine] + number % 2) % dataset.task.classes
        own = Records(dataset.train.features[mine], flipped)
        tested = max(1, round(held_out * len(mine)))
        test, train = own.take(slice(0, tested)), own.take(slice(tested, None))
        dealt.append(Client(f"site-{number}", train=train, validation=own.take(slice(0, 0)), test=test))
    return Federation(tuple(dealt), dataset.task, truth=tuple(number % 2 for number in range(clients)))
