"""Web pages.

pages.py             GET /, /docs and /redoc, with their content security policy
page.{html,css,js}   a chat; the live state of the engines, with the reasons why requests wait; the settings
docs.html            the routes, rendered from openapi.json
"""
