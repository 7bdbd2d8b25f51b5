"""The harmony format of the gpt-oss models, for rows that hold one message a channel.

The models' own chat template knows an answer's analysis and its final text as one message and leaves out
the analysis of earlier turns. This one renders what it is given: roles assistant_analysis,
assistant_commentary and assistant_final, each as a message of its channel. A plain assistant message is a
final one, its reasoning an analysis before it. Without a system message there is the models' usual one;
its effort is the variable `reasoning_effort`, "low" if not given, or the content of a message of role
assistant_reasoning_effort.

Source: the format's published description (OpenAI harmony); the roles by channel and the default system
text as SpecForge prepares gpt-oss data.
"""

HARMONY_USER = "<|start|>user<|message|>"  # what a question begins with

HARMONY_TEMPLATE = """\
{%- macro say(author, text) -%}
<|start|>{{ author }}<|message|>{{ text }}<|end|>
{%- endmacro -%}
{%- macro channel(name, text) -%}
<|start|>assistant<|channel|>{{ name }}<|message|>{{ text }}<|end|>
{%- endmacro -%}
{%- set given = namespace(effort=reasoning_effort | default("low"), system=none) -%}
{%- for message in messages -%}
{%- if message.role == "assistant_reasoning_effort" -%}
{%- set given.effort = message.content | lower -%}
{%- elif message.role == "system" and given.system is none -%}
{%- set given.system = message.content -%}
{%- endif -%}
{%- endfor -%}
{%- if given.system is none -%}
{%- set given.system -%}
You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: {{ knowledge_cutoff | default("2024-06") }}
Current date: {{ current_date | default("2025-06-28") }}

Reasoning: {{ given.effort }}

# Valid channels: analysis, commentary, final. Channel must be included for every message.
{%- endset -%}
{%- endif -%}
{{- say("system", given.system) -}}
{%- for message in messages -%}
{%- if message.role in ("user", "developer", "tool") -%}
{{- say(message.name | default("tool") if message.role == "tool" else message.role, message.content) -}}
{%- elif message.role in ("assistant_analysis", "assistant_commentary", "assistant_final") -%}
{{- channel(message.role[10:], message.content) -}}
{%- elif message.role == "assistant" -%}
{%- if message.reasoning_content -%}{{- channel("analysis", message.reasoning_content) -}}{%- endif -%}
{{- channel("final", message.content) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
