"""How ranks are started, bound to cores and watched."""
