"""Files of public data sets and folders of images: exact values, and every way to be refused."""

import gzip
import io
import pickle
import shutil
import struct
import sys
import tarfile
import types

import numpy as np
import pytest
from PIL import Image

from handspan.core.errors import HandspanError
from handspan.data import download, load_data, load_source
from handspan.data.plain_pickle import load_plain

RNG = np.random.default_rng(0)
IMAGES = {
    "train": RNG.integers(0, 256, (30, 4, 5)).astype(np.uint8),
    "t10k": RNG.integers(0, 256, (10, 4, 5)).astype(np.uint8),
}
LABELS = {
    "train": (np.arange(30) % 10).astype(np.uint8),
    "t10k": (np.arange(10) % 10).astype(np.uint8),
}


def idx(array):
    return (
        bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + bytes(array)
    )


def write_idx(folder, pack=gzip.compress, ending=".gz", dot="-"):
    folder.mkdir(parents=True, exist_ok=True)
    for part in IMAGES:
        for what, axes, array in [("images", 3, IMAGES[part]), ("labels", 1, LABELS[part])]:
            (folder / f"{part}-{what}{dot}idx{axes}-ubyte{ending}").write_bytes(pack(idx(array)))
    return folder


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("form", [(gzip.compress, ".gz", "-"), (bytes, "", "-"), (bytes, "", ".")])
def test_idx_files_are_read_exactly(tmp_path, name, form):
    source = load_source(f"{name}:{write_idx(tmp_path / 'a', *form)}")
    assert np.array_equal(source.x, np.concatenate(list(IMAGES.values())))
    assert np.array_equal(source.y, np.concatenate(list(LABELS.values())))
    assert source.is_test.tolist() == [False] * 30 + [True] * 10
    assert (source.kind, source.num_classes, source.x.dtype) == ("image", 10, np.uint8)
    data = load_data(f"{name}:{tmp_path / 'a'}", num_clients=4, keep_test=True, standardize=False)
    assert int(data.num_test.sum()) >= 4 and data.row_shape == (4, 5)
    assert 0 <= float(data.x.min()) and float(data.x.max()) <= 1


def test_a_plain_file_that_is_called_gz_is_read(tmp_path):
    folder = write_idx(tmp_path, bytes)
    assert load_source(f"mnist:{folder}").num_rows == 40


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("train-images-idx3-ubyte", lambda b: b[:-7], "should hold 600 values.* only 593"),
        ("train-images-idx3-ubyte", lambda b: b + b"x", "there are more"),
        ("train-images-idx3-ubyte", lambda b: b[:9], "inside its header"),
        ("train-images-idx3-ubyte", lambda b: b"", "begins with nothing"),
        ("train-images-idx3-ubyte", lambda b: b"\x00\x00\x0d" + b[3:], "begins with 00000d03"),
        ("t10k-labels-idx1-ubyte", lambda b: b"PK\x03\x04", "no idx file of labels"),
        ("t10k-images-idx3-ubyte", lambda b: b[:4] + b"\xff" * 12, "claims the shape"),
        ("t10k-labels-idx1-ubyte", lambda b: idx(np.zeros(9, np.uint8)), "10 images but 9 labels"),
        (
            "t10k-images-idx3-ubyte",
            lambda b: idx(np.zeros((10, 4, 4), np.uint8)),
            "differ in size",
        ),
    ],
)
def test_bad_idx_files_get_one_clear_sentence(tmp_path, file, change, words):
    write_idx(tmp_path, bytes, "")
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(change(content))
    with pytest.raises(HandspanError, match=words):
        load_source(f"mnist:{tmp_path}")


def test_a_truncated_gzip_file_is_refused_at_any_length(tmp_path):
    write_idx(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for part in range(1, 10):
        path.write_bytes(whole[: len(whole) * part // 10])
        with pytest.raises(
            HandspanError, match=r"damaged or cut off|inside its header|begins with"
        ):
            load_source(f"mnist:{tmp_path}")
    flipped = bytearray(whole)
    flipped[200] ^= 255
    path.write_bytes(flipped)
    with pytest.raises(HandspanError, match="damaged"):
        load_source(f"mnist:{tmp_path}")


def test_a_missing_file_and_folder_are_named(tmp_path):
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(HandspanError, match=r"put train-images-idx3-ubyte\.gz, .* there"):
        load_source(f"mnist:{tmp_path}")
    with pytest.raises(HandspanError, match="there is no folder"):
        load_source(f"mnist:{tmp_path / 'none'}")
    with pytest.raises(HandspanError, match="take nothing behind the colon"):
        load_source("digits:here")


# The cache, and downloads into it.


def test_files_in_the_cache_need_no_net(tmp_path, monkeypatch):
    monkeypatch.setenv("HANDSPAN_CACHE", str(tmp_path))
    write_idx(tmp_path / "mnist")
    monkeypatch.setitem(sys.modules, "pooch", None)
    assert load_source("mnist").name == "mnist"


def test_the_cache_lies_where_caches_lie(monkeypatch):
    monkeypatch.delenv("HANDSPAN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(download.cache_folder("mnist")) == "/somewhere/handspan/mnist"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert str(download.cache_folder("mnist")) == "/home/me/.cache/handspan/mnist"


def test_without_pooch_the_error_says_which_file_goes_where(tmp_path, monkeypatch):
    monkeypatch.setenv("HANDSPAN_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(HandspanError) as told:
        load_source("cifar10")
    for words in ("cifar-10-python.tar.gz", f"{tmp_path}/cifar10", "cifar10:FOLDER", "[download]"):
        assert words in str(told.value)


def pretend(monkeypatch, retrieve):
    monkeypatch.setitem(sys.modules, "pooch", types.SimpleNamespace(retrieve=retrieve))


def test_what_is_missing_is_downloaded_with_its_checksum(tmp_path, monkeypatch):
    monkeypatch.setenv("HANDSPAN_CACHE", str(tmp_path / "cache"))
    ready = write_idx(tmp_path / "net")
    asked = []

    def retrieve(url, *, known_hash, fname, path):
        asked.append((url, known_hash))
        (tmp_path / "cache" / "fashion_mnist").mkdir(parents=True, exist_ok=True)
        shutil.copy(ready / fname, f"{path}/{fname}")

    pretend(monkeypatch, retrieve)
    assert load_source("fashion_mnist").num_rows == 40
    assert len(asked) == 4 and all(url.startswith("https://") for url, _ in asked)
    assert asked[0][1] == "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"
    load_source("fashion_mnist")
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionError("no route"), r"cannot download https://.*cifar-100-python.*put cifar-100"),
        (OSError(28, "No space left on device"), "No space left"),
        (ValueError("hash differs"), "another checksum"),
    ],
)
def test_a_failed_download_says_what_to_do(tmp_path, monkeypatch, error, words):
    monkeypatch.setenv("HANDSPAN_CACHE", str(tmp_path))

    def retrieve(url, **options):
        raise error

    pretend(monkeypatch, retrieve)
    with pytest.raises(HandspanError, match=words):
        load_source("cifar100")


# CIFAR.

PIXELS = RNG.integers(0, 256, (6, 3072)).astype(np.uint8)


def batch(seed, as_bytes=False, **more):
    made = {
        "data": np.roll(PIXELS, seed, axis=0),
        "labels": [(seed + row) % 10 for row in range(6)],
        "filenames": [b"a.png"] * 6,
        **more,
    }
    return {key.encode() if as_bytes else key: value for key, value in made.items()}


def members(dump=pickle.dumps, **options):
    files = {f"data_batch_{number}": dump(batch(number, **options)) for number in range(1, 6)}
    files["test_batch"] = dump(batch(6, **options))
    files["batches.meta"] = dump({"label_names": [f"class {number}" for number in range(10)]})
    return files


def unpack(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def pack(path, files, folder="cifar-10-batches-py"):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("as_bytes", [False, True])
def test_pickled_batches_of_every_protocol_are_read_exactly(tmp_path, protocol, as_bytes):
    files = members(lambda value: pickle.dumps(value, protocol), as_bytes=as_bytes)
    source = load_source(f"cifar10:{unpack(tmp_path, files)}")
    expected = np.concatenate([np.roll(PIXELS, seed, axis=0) for seed in range(1, 7)])
    assert np.array_equal(source.x, expected.reshape(36, 3, 32, 32))
    assert source.y[:4].tolist() == [1, 2, 3, 4] and source.is_test.sum() == 6
    assert source.classes[3] == "class 3"


def test_batches_as_python_2_wrote_them_are_read():
    """An array whose bytes stand as a text, named by the modules of an older NumPy."""
    old = (
        b"\x80\x02}q\x01U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        b"K\x00\x85U\x01b\x87R(K\x01K\x02K\x02\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x04\x01\xff\x80\x00tbs."
    )
    assert load_plain(old, "old")["data"].tolist() == [[1, 255], [128, 0]]


def test_the_archive_is_read_in_place(tmp_path):
    path = pack(tmp_path / "cifar-10-python.tar.gz", members())
    by_folder = load_source(f"cifar10:{tmp_path}")
    by_file = load_source(f"cifar10:{path}")
    assert np.array_equal(by_folder.x, by_file.x) and by_file.num_rows == 36
    assert [entry.name for entry in tmp_path.iterdir()] == ["cifar-10-python.tar.gz"]
    data = load_data(f"cifar10:{path}", num_clients=3)
    assert data.row_shape == (3, 32, 32) and data.info["classes"][9] == "class 9"


def test_cifar_100_has_fine_and_coarse_labels(tmp_path):
    labels = {"fine_labels": [5, 17, 99, 3, 4, 5], "coarse_labels": [0, 1, 19, 0, 0, 0]}
    files = {name: pickle.dumps({"data": PIXELS, **labels}) for name in ("train", "test")}
    unpack(tmp_path / "cifar-100-python", files)
    source = load_source(f"cifar100:{tmp_path}")
    assert source.y.tolist() == [5, 17, 99, 3, 4, 5] * 2 and source.num_classes == 100
    assert source.fields["coarse"].tolist() == [0, 1, 19, 0, 0, 0] * 2 and source.classes == ()


@pytest.mark.parametrize("part", [0, 2, 5, 9])
def test_a_truncated_archive_is_refused(tmp_path, part):
    path = pack(tmp_path / "cifar-10-python.tar.gz", members())
    path.write_bytes(path.read_bytes()[: path.stat().st_size * part // 10])
    with pytest.raises(HandspanError, match=r"damaged, cut off or no tar|lacks the file"):
        load_source(f"cifar10:{tmp_path}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "damaged, cut off or no pickle"),
        (b"no pickle at all", "damaged, cut off or no pickle"),
        (pickle.dumps(batch(1))[:-300], "damaged, cut off or no pickle"),
        (pickle.dumps([1, 2]), "must hold a dict, not a list"),
        (pickle.dumps({"labels": [1]}), "holds no images"),
        (pickle.dumps(batch(1, data=PIXELS[:, :5])), "holds no images"),
        (pickle.dumps(batch(1, data=PIXELS.astype(float))), "holds no images"),
        (pickle.dumps(batch(1, labels=[1, 2])), "one label per image under 'labels'"),
        (pickle.dumps(batch(1, labels=[1.5] * 6)), "no class numbers"),
        (pickle.dumps(batch(1, labels=[-1] * 6)), "no class numbers"),
        (pickle.dumps(batch(1, data=np.array([{}], dtype=object))), "refused"),
    ],
)
def test_bad_batches_get_one_clear_sentence(tmp_path, content, words):
    unpack(tmp_path, {**members(), "data_batch_3": content})
    with pytest.raises(HandspanError, match=words) as told:
        load_source(f"cifar10:{tmp_path}")
    assert "data_batch_3" in str(told.value)


def test_a_missing_batch_is_named(tmp_path):
    files = members()
    del files["data_batch_2"]
    pack(tmp_path / "cifar-10-python.tar.gz", files)
    with pytest.raises(HandspanError, match="lacks the file data_batch_2 of cifar10"):
        load_source(f"cifar10:{tmp_path}")
    unpack(tmp_path / "open", files)
    with pytest.raises(HandspanError, match="lacks the file data_batch_2"):
        load_source(f"cifar10:{tmp_path / 'open'}")
    with pytest.raises(HandspanError, match=r"put cifar-100-python\.tar\.gz there"):
        load_source(f"cifar100:{tmp_path}")


class _Evil:
    """Pickles to a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def evil(path):
    return [
        pickle.dumps({"data": _Evil(exec, f"open({str(path)!r}, 'w')")}),
        pickle.dumps({"data": _Evil(eval, f"open({str(path)!r}, 'w')")}, protocol=0),
        pickle.dumps(_Evil(getattr, "text", "join")),
        pickle.dumps(_Evil(open, str(path), "w")),
        pickle.dumps(np.float64(1.0)),
        pickle.dumps(np.array([_Evil(open, str(path), "w")], dtype=object)),
        f"cos\nsystem\n(S'touch {path}'\ntR.".encode(),
        b"c_codecs\nencode\n(S'x'\nS'rot13'\ntR.",
        b"c_codecs\nencode\n}S'__call__'\nNsb.",
        b"cnumpy\ndtype\n(S'O'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"Psomething outside\n.",
    ]


@pytest.mark.parametrize("number", range(len(evil(""))))
def test_a_pickle_that_would_run_code_runs_nothing(tmp_path, number):
    target = tmp_path / "was_run"
    content = evil(target)[number]
    with pytest.raises(HandspanError, match=r"refused|damaged|must hold a dict"):
        load_plain(content, "evil")
    unpack(tmp_path, {**members(), "data_batch_1": content})
    with pytest.raises(HandspanError, match="data_batch_1"):
        load_source(f"cifar10:{tmp_path}")
    assert not target.exists()


def test_the_refusal_names_what_was_asked_for():
    with pytest.raises(HandspanError, match=r"asks for builtins\.exec.*could run code"):
        load_plain(pickle.dumps(_Evil(exec, "1")), "evil")


def test_lying_arrays_are_refused():
    honest = pickle.dumps({"data": np.zeros(4, np.int32)}, protocol=2)
    kind = honest.index(b"i4")
    for place, byte in [(kind + 1, b"8"), (kind, b"O"), (kind, b"V")]:
        lying = honest[:place] + byte + honest[place + 1 :]
        with pytest.raises(HandspanError, match="refused"):
            load_plain(lying, "lying")
    made = load_plain(pickle.dumps({"a": np.asfortranarray([[1, 2], [3, 4]])}, protocol=2), "made")
    assert made["a"].tolist() == [[1, 2], [3, 4]]
    big = load_plain(pickle.dumps({"a": np.array([1, 2], ">i2")}), "made")
    assert big["a"].tolist() == [1, 2]


# Folders of images.


def write_images(root, mode="L", size=(5, 4), ending="png", clients=("north", "south")):
    made = {}
    for number, client in enumerate(clients):
        for label in ("cat", "dog"):
            folder = root / client / label
            folder.mkdir(parents=True)
            for row in range(2):
                shape = (size[1], size[0]) + ((3,) if mode == "RGB" else ())
                pixels = np.random.default_rng(10 * number + row).integers(0, 256, shape)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{row}.{ending}")
                made[client, label, row] = pixels
    return made


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_folders_are_clients_and_labels(tmp_path, mode):
    made = write_images(tmp_path, mode)
    (tmp_path / ".hidden").write_text("")
    source = load_source(f"folder:{tmp_path}")
    assert source.client.tolist() == ["north"] * 4 + ["south"] * 4
    assert source.y.tolist() == [0, 0, 1, 1] * 2 and source.classes == ("cat", "dog")
    assert np.array_equal(source.x[5], made["south", "cat", 1])
    data = load_data(f"folder:{tmp_path}", partition="natural")
    assert data.names == ("north", "south") and data.row_shape == source.x.shape[1:]


def test_grey_and_transparent_images_join_coloured_ones(tmp_path):
    write_images(tmp_path, "RGB")
    grey = np.full((4, 5), 7, np.uint8)
    Image.fromarray(grey).save(tmp_path / "north" / "cat" / "0.png")
    clear = np.dstack([np.full((4, 5, 3), 9, np.uint8), np.zeros((4, 5), np.uint8)])
    Image.fromarray(clear).save(tmp_path / "north" / "cat" / "1.png")
    source = load_source(f"folder:{tmp_path}")
    assert (source.x[0] == 7).all() and (source.x[1] == 9).all()


def test_bad_folders_get_one_clear_sentence(tmp_path):
    def refused(words, path=tmp_path / "a"):
        with pytest.raises(HandspanError, match=words):
            load_source(f"folder:{path}")

    for path in ("", tmp_path / "none"):
        refused("there is no folder", path)
    (tmp_path / "a").mkdir()
    refused("holds no images")
    write_images(tmp_path / "a", clients=["north"])
    refused("a single client .north.")
    write_images(tmp_path / "a", clients=["south"])
    stray = tmp_path / "a" / "notes.txt"
    stray.write_text("hello")
    refused(r"notes\.txt lies where a folder for a client should be")
    stray.rename(tmp_path / "a" / "north" / "cat" / "notes.txt")
    refused(r"notes\.txt is no image")
    (tmp_path / "a" / "north" / "cat" / "notes.txt").unlink()
    odd = tmp_path / "a" / "south" / "dog" / "1.png"
    whole = odd.read_bytes()
    Image.fromarray(np.zeros((4, 9), np.uint8)).save(odd)
    refused(r"1\.png has 9x4 pixels, but .* has 5x4")
    odd.write_bytes(whole[: len(whole) - 25])
    refused(r"1\.png is damaged")
    odd.write_bytes(b"no image")
    refused(r"1\.png is damaged, or no image")
    Image.fromarray(np.zeros((4, 5), np.uint16)).save(odd)
    refused("8 bits a channel")


def test_without_pillow_the_error_names_the_extra(tmp_path, monkeypatch):
    write_images(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(HandspanError, match=r"handspan\[images\]"):
        load_source(f"folder:{tmp_path}")
