"""Planning: the memory, time and cost of a workload on any mesh, estimated first and then checked by the compiler."""
