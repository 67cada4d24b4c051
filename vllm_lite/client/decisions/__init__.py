"""Typed decisions: questions about one state, each answered by the probabilities of a single token. No text is made

questions.py   what may be asked, and what the model is shown of it
shared.py      the prompts of all questions, of which most is the same
labels.py      the tokens by which a model names an option
reads.py       from prompts to answers: one request of the engine for each question
answers.py     the answers
methods.py     decide() of LLM, and what AsyncClient shares with it
"""
