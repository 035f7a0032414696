from __future__ import annotations

import jinja2
import pytest

from tokservice.tokenizer import template_marks

# template -> how it reads with each "T" that it may write changed to "M"
CASES = {
    "T {{ x }} T": "M x M",
    "{{ 'T' + x ~ 'T' }}": "MxM",
    "{% if x == 'T' or 'T' in x %}T{% elif x.startswith('T') %}T{% else %}T{% endif %}": "M",
    "{{ 'TxT'.split('T') | join('T') }}": "MxM",  # split by T there is nothing to split in MxM
    "{{ y.split('T') | join('T') }}": "aMb",
    "{{ y | replace('T', '-') }}": "a-b",
    "{{ y.replace('T', '-') }}{{ z | default('T') }}": "a-bM",
    "{% set s = 'T' %}{{ s }}": "M",
    "{% set n = namespace(s='T') %}{{ n.s }}": "M",
    "{% macro m(a, b='T') %}{{ a }}{{ b }}{% endmacro %}{{ m('T') }}": "MM",
    "{{ 'T' if x is eq('T') else 'TT' }}": "MM",
    "{{ {'T': 'T'}['T'] }}": "M",
    "{% for c in ['T', 'x'] if c != 'T' %}{{ c }}{% else %}T{% endfor %}": None,
    "{% filter upper %}T{% endfilter %}": "M",
    "{{ 'T%s' % x }}{{ 'T{}'.format('T') }}": "MxMM",
    "{{ y[:1] }}{{ 'T'[0:1] }}": "aM",
}


@pytest.mark.parametrize("source", CASES)
def test_what_is_written_is_changed_and_what_is_looked_for_is_not(source: str) -> None:
    environment = jinja2.Environment()
    tree = environment.parse(source)
    template_marks.rewrite(tree, lambda text: text.replace("T", "M"))
    text = environment.from_string(tree).render(x="x", y="aTb")
    assert text == ("Mx" if CASES[source] is None else CASES[source])


def test_written_texts_are_listed() -> None:
    tree = jinja2.Environment().parse(
        "a{{ 'b' + x.split('c')[0] }}{{ raise_exception('d') }}{% if 'e' in x %}f{% endif %}"
    )
    assert template_marks.written(tree) == ["a", "b", "f"]
