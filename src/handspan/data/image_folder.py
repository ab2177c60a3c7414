"""Images that lie in folders, ``PATH/client/label/image.png``: needs Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from handspan.core.errors import HandspanError
from handspan.data.source import Source

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_GREY = ("1", "L")
_COLOUR = ("P", "RGB", "RGBA", "LA", "PA", "CMYK", "YCbCr")


def load_folder(path: str | None = None, task: str = "auto") -> Source:
    """Read all images below a folder: clients, in them labels, in them images of one size."""
    name = f"folder:{path or ''}"
    root = Path(path or "").expanduser()
    if not path or not root.is_dir():
        raise HandspanError(f"there is no folder {str(path or '')!r}: write folder:PATH")
    files = _list(root)
    classes = sorted({file.parent.name for file in files})
    clients = np.array([file.parent.parent.name for file in files])
    if len(set(clients.tolist())) < 2:
        raise HandspanError(
            f"{root} holds a single client ({clients[0]}): a federation needs several folders "
            "PATH/client/label"
        )
    number = {label: position for position, label in enumerate(classes)}
    return Source(
        x=_read_all(files),
        y=np.array([number[file.parent.name] for file in files], dtype=np.int64),
        name=name,
        kind="image",
        client=clients,
        fields={"client": clients},
        num_classes=len(classes),
        classes=tuple(classes),
    )


def _list(root: Path) -> list[Path]:
    """All images in the order of their names; anything that lies elsewhere is refused."""
    files = []
    for client in _entries(root, "client"):
        for label in _entries(client, "label"):
            for file in sorted(label.iterdir()):
                if file.name.startswith("."):
                    continue
                if not file.is_file() or file.suffix.lower() not in ENDINGS:
                    raise HandspanError(
                        f"{file} is no image ({', '.join(ENDINGS)}): below {root} there must be "
                        "client/label/image and nothing else"
                    )
                files.append(file)
    if not files:
        raise HandspanError(f"{root} holds no images: they are looked for in PATH/client/label")
    return files


def _entries(folder: Path, what: str) -> list[Path]:
    entries = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")]
    for entry in entries:
        if not entry.is_dir():
            raise HandspanError(
                f"{entry} lies where a folder for a {what} should be: images are looked for in "
                "PATH/client/label"
            )
    return entries


def _read_all(files: list[Path]) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError:
        raise HandspanError("reading images needs Pillow: install handspan[images]") from None
    modes = {_look(Image, file)[0] for file in files}
    mode = "L" if modes <= set(_GREY) else "RGB"
    _, size = _look(Image, files[0])
    shape = (len(files), size[1], size[0]) + ((3,) if mode == "RGB" else ())
    rows = np.empty(shape, dtype=np.uint8)
    for position, file in enumerate(files):
        found, image = _decode(Image, file, mode)
        if found != size:
            raise HandspanError(
                f"{file} has {found[0]}x{found[1]} pixels, but {files[0]} has {size[0]}x{size[1]}: "
                "bring all images to one size first"
            )
        rows[position] = image
    return rows


def _look(library: Any, file: Path) -> tuple[str, tuple[int, int]]:
    """Mode and size of an image, without decoding it."""
    try:
        with library.open(file) as image:
            mode, size = image.mode, image.size
    except (OSError, ValueError, SyntaxError, library.DecompressionBombError):
        raise HandspanError(f"{file} is damaged, or no image that Pillow can read") from None
    if mode not in _GREY + _COLOUR:
        raise HandspanError(f"{file} is an image of kind {mode}: save it with 8 bits a channel")
    return mode, size


def _decode(library: Any, file: Path, mode: str) -> tuple[tuple[int, int], np.ndarray]:
    try:
        with library.open(file) as image:
            if image.mode in ("LA", "PA", "RGBA", "P") and mode == "RGB":
                return image.size, np.asarray(image.convert("RGBA").convert("RGB"))
            return image.size, np.asarray(image.convert(mode))
    except (OSError, ValueError, SyntaxError, EOFError, library.DecompressionBombError):
        raise HandspanError(f"{file} is damaged or cut off: replace or remove it") from None
