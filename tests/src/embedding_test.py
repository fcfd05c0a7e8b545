"""The program of docs/embedding_example.md, run as a user would: it trains through NVMe, and its weights fall."""
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402


class EmbeddingExample(unittest.TestCase):
    def test_TrainsThroughAllTiersAndExports(self):
        with tempfile.TemporaryDirectory() as folder:
            nvme = {"device": "nvme", "nvme_path": f"{folder}/nvme"}
            config = pathlib.Path(folder, "ds_config.json")
            config.write_text(json.dumps({
                "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
                "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}}))
            run = subprocess.run([os.environ["SPILLWAY_EXAMPLE"], config, f"{folder}/out"], text=True,
                                 capture_output=True, timeout=120)
            self.assertEqual(run.returncode, 0, run.stderr)
            norms = [float(norm) for norm in re.findall(r"gradient norm ([\d.]+)", run.stdout)]
            self.assertEqual(len(norms), 20)
            self.assertEqual(sorted(norms, reverse=True), norms, "every step goes down")
            # Adam's first steps move every weight by about the learning rate: 1 - 20 * 0.02.
            data = pathlib.Path(folder, "out/model.safetensors").read_bytes()
            start = 8 + struct.unpack("<Q", data[:8])[0]
            values = struct.unpack(f"<{4 * 512 * 300}f", data[start:])
            self.assertTrue(all(0.55 < value < 0.65 for value in values), (min(values), max(values)))


if __name__ == "__main__":
    main()
