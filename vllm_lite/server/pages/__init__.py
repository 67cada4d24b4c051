"""Pages for people.

pages.py             GET /, /docs and /redoc, with the policy that browsers hold them to
page.{html,css,js}   a chat; what the engines do, live, and why a request waits; what is served
docs.html            the routes, as openapi.json has them
"""
