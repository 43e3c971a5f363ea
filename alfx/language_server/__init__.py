"""Language server for conf files: what an editor shows while a conf is written.

- ``text``: what is written at a position of a conf;
- ``problems``: the mistakes of a conf with their locations in its text;
- ``answers``: hover, completion and definition;
- ``server``: the connection to the editor, with pygls.

All but ``server`` are functions of text and positions. Lines and columns are counted from 0.
"""
