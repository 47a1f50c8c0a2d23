"""The daemon: settings, wiring, signals, drain order.

Promises that what `serve` starts is what the configuration says. It must not hold the life of a VM (that is
`fleet`) nor speak HTTP itself (that is `web`).
"""
