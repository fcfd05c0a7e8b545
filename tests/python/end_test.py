"""What an engine's end keeps: close(), `with`, and garbage collection, with commits at some steps alone."""
from case import Case as Folder
from case import main

import gc
import shutil

import spillway
from toy_model import batches, config, model, train


class End(Folder):
    def engine(self, configuration=None, **options):
        return super().engine(model(), configuration, **options)

    def assert_kept(self, steps):
        again = self.engine(on_existing="resume")
        self.assertEqual(steps, again.current_step)
        again.close()

    def seldom(self):
        return config(self.folder, spillway={"commit_every": 3})

    def test_TheEndKeepsTheLastFinishedStep(self):
        engine = self.engine(configuration=self.seldom())
        train(engine, 4)
        engine.close()
        self.assert_kept(4)
        with self.engine(configuration=self.seldom(), on_existing="replace") as engine:
            train(engine, 2)
            engine.backward(engine(batches(1)[0]))  # of a step that does not come to its end
        self.assert_kept(2)
        forgotten = spillway.Engine(model(), self.seldom(), on_existing="replace")
        train(forgotten, 1)
        del forgotten, engine
        gc.collect()
        self.assert_kept(1)

    def test_AnExceptionKeepsTheLastFinishedStepAndStaysItself(self):
        with self.assertRaisesRegex(ValueError, "of the loop"):
            with self.engine(configuration=self.seldom()) as engine:
                train(engine, 2)
                raise ValueError("of the loop")
        self.assert_kept(2)

    def test_AnEndThatCannotKeepTheLastStepSaysSo(self):
        store = self.folder / "store"
        engine = self.engine(configuration=self.seldom())
        train(engine, 2)
        shutil.rmtree(store)
        error = self.assert_error("was removed, moved or cut short while its run goes on", engine.close)
        self.assertEqual("not_found", error.code)
        engine.close()  # it is
        engine = spillway.Engine(model(), self.seldom())
        train(engine, 2)
        shutil.rmtree(store)
        with self.assertLogs("spillway", "WARNING") as said:
            del engine
            gc.collect()
        self.assertIn("was removed, moved or cut short", " ".join(said.output))


if __name__ == "__main__":
    main()
