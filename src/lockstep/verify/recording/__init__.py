"""What `lockstep verify` runs inside the processes of the script: it records every update."""
