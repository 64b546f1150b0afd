"""Whether a record's scattering features depend on the records beside it, on a GPU, and how fast they are.

    python benchmarks/scattering.py [--records 4096]

Prints the largest difference between features computed together and features of the same records in another
order and in pieces of other sizes; the largest difference from a CPU's; and records a second.
"""

import argparse
import time

import torch

from coterie.data import Task
from coterie.models.scattering import Scattering

PIECES = (1, 2, 3, 7, 64, 500, 512)


def in_pieces(transform: Scattering, images: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([transform(part) for part in images.split(size)])


@torch.inference_mode()
def measured(shape: tuple[int, int, int], records: int) -> str:
    generator = torch.Generator().manual_seed(0)
    # Noise, black and white records, and an outlier: whatever stands beside a record must not change it.
    images = torch.rand(records, *shape, generator=generator)
    images[0], images[1], images[2] = 0.0, 1.0, 1e3
    there = torch.device("cuda")
    # The transform is a module of a CPU until it is moved: one of each.
    own = Scattering(Task("classification", shape, 10))
    far = Scattering(Task("classification", shape, 10)).to(there)
    given = images.to(there)
    together = in_pieces(far, given, 512)
    apart = 0.0
    for size in PIECES:
        order = torch.randperm(records, generator=generator).to(there)
        few = order[: 300 * size]
        apart = max(apart, float((in_pieces(far, given[few], size) - together[few]).abs().max()))
    from_cpu = float((in_pieces(own, images[:512], 8) - together[:512].cpu()).abs().max())
    in_pieces(far, given, 512)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        in_pieces(far, given, 512)
    torch.cuda.synchronize()
    rate = 5 * records / (time.perf_counter() - began)
    return f"| {'x'.join(map(str, shape))} | {records} | {apart:.1e} | {from_cpu:.1e} | {rate:,.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--records", type=int, default=4096)
    given = parser.parse_args()
    print("| image | records | in other company | from a CPU | records a second |")
    print("|---|---|---|---|---|")
    for shape in ((3, 32, 32), (1, 28, 28)):
        print(measured(shape, given.records), flush=True)


if __name__ == "__main__":
    main()
