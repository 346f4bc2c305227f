"""Running code that nobody vouches for: `client.Sandbox` runs programs in boxes without network, host files or privileges, or refuses to.

One small single-threaded supervisor process per trainer launches every box (`client` starts it, `supervisor` is it); it never imports JAX, and
it and all boxes die with the trainer. A box is a bubblewrap container of an unprivileged user (`bwrap`, `seccomp`, `box`) on a machine that
`host` prepared (`linux`, `cgroup`). There is no weaker fallback: where boxes cannot be had, starting a sandbox fails.

Deliberately absent: snapshots of the workspace, interactive shells, boxes started ahead of need, boxes on other machines, GPUs inside.
"""
