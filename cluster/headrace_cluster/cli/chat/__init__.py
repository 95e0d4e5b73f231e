"""`headrace chat`: a conversation on the terminal, or one answer.

start.py chooses between the two; session.py is the loop; its decisions are in pure modules:

    entry.py          parses what a person enters: a message, a command, or a part of either
    commands.py       the slash commands          completion.py     what Tab completes
    conversation.py   the messages                chat_settings.py  /set
    transcript.py     /save and /load             answer_meter.py   speed and tokens of one answer
    word_wrap.py      breaks lines between words

editor.py (prompt_toolkit), history.py, buffered_input.py and terminal.py do the input and output.
"""
