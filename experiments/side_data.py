"""Files for the tables about side information: ``python -m experiments.side_data NAME ...``.

``omniglot`` divides ``omniglot28.npz`` (x: characters, 20 drawers, 28, 28; alphabet of each
character) as appendix D of PerFedSI does, for 50, 200 and 500 clients; z is the mean embedding of a
client's training rows under a classifier of alphabets, trained on all of them. ``school`` and
``landmine`` (x, y, client) give each client the means of its features; of school, the features
that describe schools are the side information, those of pupils the rows, and marks are in units
of their standard deviation. ``largest`` keeps the 12 largest fields of ``landmine.npz``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn

DRAWERS = {50: (1, 16, 4), 200: (4, 4, 1), 500: (10, 1, 1)}
"""Clients per alphabet, training and test rows per character and client (Table 2)."""


def divided(alphabet: np.ndarray, num_clients: int, seed: int) -> tuple[np.ndarray, ...]:
    """Return client and is_test of each (character, drawer): each client has one alphabet."""
    rng = np.random.default_rng(seed)
    per, train, test = DRAWERS[num_clients]
    client = np.repeat(np.arange(per), train + test)
    is_test = np.tile(np.arange(train + test) >= train, per)
    order = np.argsort(rng.random((len(alphabet), 20)), axis=1)  # whose drawing is whose
    place = np.argsort(order, axis=1)
    return alphabet[:, None].astype(int) * per + client[place], is_test[place]


def alphabet_embedding(x: np.ndarray, alphabet: np.ndarray, epochs: int, device: str) -> nn.Module:
    """Train the classifier of alphabets, the network of the experiment with 50 outputs."""
    from handspan.models.zoo import make_model

    torch.manual_seed(0)
    model = make_model("omniglot", x.shape[1:], int(alphabet.max()) + 1)().to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    rows, labels = (torch.as_tensor(a).to(device) for a in (x, alphabet.astype(np.int64)))
    for epoch in range(epochs):
        right = 0
        for batch in torch.randperm(len(rows)).to(device).split(64):
            outputs = model(rows[batch].float() / 255)
            right += int((outputs.argmax(1) == labels[batch]).sum())
            optimiser.zero_grad()
            nn.functional.cross_entropy(outputs, labels[batch]).backward()
            optimiser.step()
        print(f"epoch {epoch}: {right / len(rows):.3f} of the training rows right", flush=True)
    model.head = nn.Identity()
    return model.eval()


def mean_by_client(values: np.ndarray, client: np.ndarray) -> np.ndarray:
    """Mean of each client's values, standardised over the clients."""
    count = np.bincount(client)
    mean = np.stack([np.bincount(client, weights=v) / count for v in values.T], axis=1)
    return (mean - mean.mean(0)) / np.maximum(mean.std(0), 1e-9)


def omniglot(folder: Path, device: str, epochs: int, sizes: list[int]) -> None:
    """Write ``omniglot-50.npz`` and so on."""
    raw = np.load(folder / "omniglot28.npz")
    x = np.pad(raw["x"], ((0, 0), (0, 0), (2, 2), (2, 2))).reshape(-1, 32, 32)
    y, alphabet = (np.repeat(a, 20) for a in (np.arange(len(raw["alphabet"])), raw["alphabet"]))
    for num_clients in sizes:
        client, is_test = (a.reshape(-1) for a in divided(raw["alphabet"], num_clients, 0))
        train = ~is_test
        encoder = alphabet_embedding(x[train], alphabet[train], epochs, device)
        with torch.no_grad():
            parts = torch.as_tensor(x[train]).split(1000)
            codes = torch.cat([encoder(part.to(device).float() / 255).cpu() for part in parts])
        side = mean_by_client(codes.double().numpy(), client[train]).astype(np.float32)
        path = folder / f"omniglot-{num_clients}.npz"
        np.savez_compressed(path, x=x, y=y, client=client, is_test=is_test, side=side)
        print(f"{path}: {len(side)} clients, {train.sum() / len(side):.0f} training rows each")


def school(folder: Path) -> None:
    """Write ``school-side.npz``: pupils' features as rows, those of their school as z."""
    raw = np.load(folder / "school.npz")
    x, client = raw["x"].astype(float), raw["client"].astype(int)
    first = np.unique(client, return_index=True)[1]
    describes = (x == x[first[client]]).all(0) & (x.std(0) > 0)
    side = x[first][:, describes]
    side = (side - side.mean(0)) / side.std(0)
    print(f"{describes.sum()} features describe schools, {(~describes).sum()} describe pupils")
    rows = x[:, ~describes & (x.std(0) > 0)]
    y = (raw["y"] - raw["y"].mean()) / raw["y"].std()
    np.savez(folder / "school-side.npz", x=rows, y=y, client=client, side=side)


def landmine(folder: Path) -> None:
    """Write ``landmine-side.npz``: the means of a field's features as z."""
    raw = np.load(folder / "landmine.npz")
    side = mean_by_client(raw["x"], raw["client"].astype(int))
    np.savez(
        folder / "landmine-side.npz",
        x=raw["x"],
        y=raw["y"].astype(np.int64),
        client=raw["client"].astype(int),
        side=side,
    )


def largest(folder: Path, count: int = 12) -> None:
    """Write ``landmine12.npz``: the fields with the most rows."""
    data = np.load(folder / "landmine.npz")
    rows = np.bincount(data["client"])
    mine = np.isin(data["client"], np.argsort(-rows, kind="stable")[:count])
    kept = {name: data[name][mine] for name in ("x", "y", "client")}
    np.savez_compressed(folder / f"landmine{count}.npz", **kept)


def main() -> None:
    """Write the files that are named."""
    parser = argparse.ArgumentParser(prog="python -m experiments.side_data", description=__doc__)
    parser.add_argument("names", nargs="+", choices=("omniglot", "school", "landmine", "largest"))
    parser.add_argument("--data-folder", default="data", help="where omniglot28.npz and others are")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=10, help="of the classifier of alphabets")
    parser.add_argument("--clients", type=int, nargs="+", default=[50, 200, 500])
    options = parser.parse_args()
    folder = Path(options.data_folder)
    if "omniglot" in options.names:
        omniglot(folder, options.device, options.epochs, options.clients)
    if "school" in options.names:
        school(folder)
    if "landmine" in options.names:
        landmine(folder)
    if "largest" in options.names:
        largest(folder)


if __name__ == "__main__":
    main()
