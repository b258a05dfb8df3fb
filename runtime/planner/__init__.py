"""Before a machine is rented: what a workload needs and takes on any mesh, estimated, then asked of the compiler."""
