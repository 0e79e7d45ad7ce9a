"""The offload core: routed experts in host memory, some of them in slots on the device. One code for every host."""
