"""`spillway import` of files that somebody made to do harm, or that a drive has damaged."""
import os
import pathlib
import random
import shutil
import struct
import sys
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
import torch_files  # noqa: E402
from imports import STATES, Small  # noqa: E402
from seed import test_seed  # noqa: E402
from torch_files import Call, Named, Storage, Tensor  # noqa: E402


class Command:
    """Would be run by pickle.loads()."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class Hostile(Small):
    def replace(self, value=None, *, pickled=None, entries=None, **options):
        """The checkpoint with another file in the place of rank 0's optimizer states."""
        checkpoint = self.checkpoint()
        folder = self.write(checkpoint)
        file = self.file(checkpoint)
        if pickled is not None:
            entries = [("a/data.pkl", pickled)]
        if entries is not None:
            torch_files.write_zip(file, entries, **options)
        else:
            torch_files.save(value, file, **options)
        return folder

    def test_WhatAPickleAsksToRunIsNotRun(self):
        ran = self.place.folder / "ran"
        self.refused(self.replace(Command(ran)), "optimizer_state_dict")
        checkpoint = self.checkpoint()
        checkpoint.more = {"client": Command(ran), "optimizer": Call(Named("builtins", "eval"), f"open('{ran}', 'w')")}
        folder = self.write(checkpoint)
        self.assert_done(self.imported(folder))
        self.assertFalse(ran.exists())
        # The same file does run it where it is unpickled.
        with zipfile.ZipFile(self.file(checkpoint, "0_mp_rank_00_model_states.pt")) as file:
            self.assertIn(b"posix\nsystem", file.read(file.namelist()[0]))

    def test_MalformedPickles(self):
        cases = {
            "ends early": [b"", b"\x80\x02", b"\x80\x02X\xff\xff\xff\xff", b"\x80\x02cos\nsystem",
                           b"\x80\x02\x8a\x08\x01", b"\x80\x05\x8d" + b"\xff" * 8,
                           b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f"],
            "empty stack": [b"\x80\x02.", b"\x80\x02R.", b"\x80\x02s.", b"\x80\x02(0."],
            "no mark": [b"\x80\x02t.", b"\x80\x02}u."],
            "opcode 0x69": [b"\x80\x02(ios\nsystem\n."],
            "opcode 0x49": [b"I1\n."],
            "protocol 9": [b"\x80\x09."],
            "remembers": [b"\x80\x02Nr\xff\xff\xff\xff."],
            "asks for value": [b"\x80\x02h\x00."],
            "holds none": [b"\x80\x02NNa.", b"\x80\x02](NNu.", b"\x80\x02}(Ne."],
            "without a tuple": [b"\x80\x02cos\nsystem\nNR."],
        }
        for words, pickles in cases.items():
            for pickled in pickles:
                with self.subTest(pickled=pickled):
                    self.refused(self.replace(pickled=pickled), words)

    def test_AMemoBombCostsNothing(self):
        bomb = b"\x80\x02]q\x00" + b"".join(
            b"](" + struct.pack("<BB", ord("h"), i) * 50 + b"eq" + bytes([i + 1]) for i in range(250)) + b"."
        self.refused(self.replace(pickled=bomb), "optimizer_state_dict")
        itself = b"\x80\x02]q\x00h\x00a."
        self.refused(self.replace(pickled=itself), "optimizer_state_dict")
        deep = b"\x80\x02" + b"(" * 2_000_000 + b"N" + b"t" * 2_000_000 + b"."
        self.refused(self.replace(pickled=deep), "optimizer_state_dict")
        self.refused(self.replace(pickled=b"\x80\x02" + b"]" * 5_000_000 + b"."), "more than")

    def test_TensorsThatLieElsewhere(self):
        def zero(tensor):
            checkpoint = self.checkpoint()
            checkpoint.tensor = lambda *_: tensor
            return self.write(checkpoint)

        data = Storage(bytes(64))
        huge = Storage(bytes(64))
        for words, tensor in (("in a storage of 16", Tensor(data, (17,))),
                              ("in a storage of 16", Tensor(data, (8,), first=9)),
                              ("in a storage of 16", Tensor(data, (1,), first=(1 << 62))),
                              ("more than 2^55", Tensor(huge, (1 << 40, 1 << 40))),
                              ("is not contiguous", Tensor(data, (4,), strides=(2,))),
                              ("is kept in torch.LongStorage", Tensor(Storage(bytes(64), "q"), (4,)))):
            with self.subTest(words):
                self.refused(zero(tensor), words)

    def test_StoragesThatAreNotInTheFile(self):
        value = self.checkpoint().optimizer_state(self.place.folder, 0)
        pickled, _ = torch_files.dumps(value)
        self.refused(self.replace(pickled=pickled), "and the file has 0")
        escaped = pickled.replace(b"X\x01\x00\x00\x000", b"X\x0d\x00\x00\x00../../../x/yz")
        self.assertNotEqual(pickled, escaped)
        (self.place.folder / "x").mkdir()
        (self.place.folder / "x" / "yz").write_bytes(bytes(1 << 20))
        self.refused(self.replace(pickled=escaped), "and the file has 0")

    def test_FilesThatAreNoArchiveOfTorch(self):
        checkpoint = self.checkpoint()
        folder = self.write(checkpoint)
        file = self.file(checkpoint)
        whole = file.read_bytes()
        for content, words in ((b"", "does not begin as a zip"), (b"hello", "does not begin as a zip"),
                               (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "before PyTorch 1.6"),
                               (whole[:len(whole) // 2], "cannot be read as a zip"),
                               (whole[:-1], "cannot be read as a zip")):
            file.write_bytes(content)
            with self.subTest(words):
                self.refused(folder, file, words)
        file.unlink()
        os.mkfifo(file)
        self.refused(folder, file, "not a regular file")
        value = self.checkpoint().optimizer_state(self.place.folder, 0)
        self.refused(self.replace(value, byteorder="big"), "big-endian")
        packed = self.replace(entries=torch_files.entries_of(value), compression=zipfile.ZIP_DEFLATED)
        self.refused(packed, "compressed")
        self.refused(self.replace(entries=[("x", b"")]), "0 entries NAME/data.pkl")
        self.refused(self.replace(entries=[("a/data.pkl", b"N."), ("b/data.pkl", b"N.")]), "2 entries NAME/data.pkl")

    def test_AnEntryThatClaimsMoreThanItHas(self):
        checkpoint = self.checkpoint()
        folder = self.write(checkpoint)
        file = self.file(checkpoint)
        data = bytearray(file.read_bytes())
        central = data.find(b"PK\x01\x02")
        for size in (0xfffffff0, len(data) * 2):
            data[central + 20:central + 28] = struct.pack("<II", size, size)
            file.write_bytes(data)
            self.refused(folder, file)

    def test_EntriesThatOverlapAreAtMostTheSameBytes(self):
        checkpoint = self.checkpoint()
        folder = self.write(checkpoint)
        file = self.file(checkpoint)
        with zipfile.ZipFile(file) as archive:
            first, second = [archive.getinfo(name) for name in archive.namelist() if "/data/" in name][:2]
        data = bytearray(file.read_bytes())
        entry = data.rfind(second.filename.encode()) - 46  # of the central directory
        data[entry + 42:entry + 46] = struct.pack("<I", first.header_offset)
        file.write_bytes(data)
        self.refused(folder, file)  # by libzip, or by the checksum

    def test_RandomDamageIsAnErrorOrChangesNothingThatIsRead(self):
        damage = random.Random(test_seed())
        checkpoint = self.checkpoint()
        folder = self.write(checkpoint)
        self.assert_done(self.imported(folder))
        wanted = [(self.out / f"{stem}.safetensors").read_bytes() for stem in STATES]
        file = self.file(checkpoint)
        whole = file.read_bytes()
        for _ in range(int(os.environ.get("SPILLWAY_CASES", "40"))):
            shutil.rmtree(self.out, ignore_errors=True)
            data = bytearray(whole)
            for _ in range(damage.randrange(1, 4)):
                data[damage.randrange(len(data))] ^= 1 << damage.randrange(8)
            file.write_bytes(data)
            run = self.imported(folder)
            if run.status == 0:
                self.assertTrue(wanted == [(self.out / f"{stem}.safetensors").read_bytes() for stem in STATES])
            else:
                self.assert_refused(run)
                self.assertFalse(self.out.exists())

    def test_DamagedPicklesInsideSoundFilesAreReadOrRefused(self):
        damage = random.Random(test_seed())
        checkpoint = self.checkpoint(ranks=2)
        folder = self.write(checkpoint)
        endings = ("0_mp_rank_00_model_states.pt", "1_mp_rank_00_optim_states.pt")
        for _ in range(int(os.environ.get("SPILLWAY_CASES", "60"))):
            shutil.rmtree(self.out, ignore_errors=True)
            file = self.file(checkpoint, damage.choice(endings))
            whole = file.read_bytes()
            with zipfile.ZipFile(file) as archive:
                entries = [[name, archive.read(name)] for name in archive.namelist()]
            pickled = bytearray(entries[0][1])
            for _ in range(damage.randrange(1, 4)):
                pickled[damage.randrange(len(pickled))] = damage.choice((damage.randrange(256), 0, 255, ord(".")))
            entries[0][1] = bytes(pickled)
            torch_files.write_zip(file, entries)
            run = self.imported(folder)
            file.write_bytes(whole)
            if run.status != 0:
                self.assert_refused(run)
                self.assertFalse(self.out.exists())


if __name__ == "__main__":
    main()
