"""What Open MPI's mpirun is told by tests, and what it has left."""
import os
import pathlib

# A container has one user, and fewer cores than ranks.
ANYWHERE = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}
# Nothing outside this machine is asked for.
ONE_HOST = {**ANYWHERE, "OMPI_MCA_btl": "self,vader", "OMPI_MCA_plm": "isolated"}


def processes_of(folder):
    """Those that are alive and have it on their command line."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            named = os.fsencode(folder) in (process / "cmdline").read_bytes()
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if named and state != "Z" and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found
