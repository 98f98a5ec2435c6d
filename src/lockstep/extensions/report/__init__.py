"""What a run shows: its choices, its progress, its means, how it ended, and the report of it.

`console` prints lines and the block of choices; `progress`, `displays` and `pass_text` show how a
pass goes; `metrics` averages what the script logs; `closing` and `network_advice` print the last
and some early lines. `record` writes the record of a run and `reading` reads it (`record_format`);
`analysis`, `charts`, `page`, `live` and `trackers` are the commands of `lockstep report`.
"""
