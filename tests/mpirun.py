"""What Open MPI's mpirun is told by tests."""
import os

# A container has one user, and fewer cores than ranks.
ANYWHERE = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}
# Nothing outside this machine is asked for.
ONE_HOST = {**ANYWHERE, "OMPI_MCA_btl": "self,vader", "OMPI_MCA_plm": "isolated"}
