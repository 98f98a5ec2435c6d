"""What is patched in torch and Lockstep while a script is recorded; `install` lists it all."""
