"""Pages for people.

pages.py      GET /, /docs and /redoc, with the policy that browsers hold them to
welcome.html  what is served, and a box to try it
docs.html     the routes, as openapi.json has them
"""
