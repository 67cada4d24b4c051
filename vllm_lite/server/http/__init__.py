"""HTTP below the routes: limits of connections, reading of bodies, API keys."""
