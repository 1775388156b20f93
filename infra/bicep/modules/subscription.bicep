metadata description = 'A subscription of the topic, and the identities that may read it.'

param namespaceName string
param topicName string

@maxLength(50)
param name string

@description('SQL filter on the application properties that imds-bridge sets.')
@maxLength(1024)
param filter string = '1=1'

param timeToLive string = 'P14D'

@description('Whether expired messages are dead-lettered.')
param deadLetterExpired bool = true

param receiverIds string[]
@allowed(['Group', 'ServicePrincipal', 'User'])
param receiverType string = 'ServicePrincipal'

var dataReceiver = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', '4f6d3b9b-027b-4f4c-9142-0e5a2a2247e0')

resource bus 'Microsoft.ServiceBus/namespaces@2024-01-01' existing = {
  name: namespaceName
}

resource topic 'Microsoft.ServiceBus/namespaces/topics@2024-01-01' existing = {
  parent: bus
  name: topicName
}

resource sub 'Microsoft.ServiceBus/namespaces/topics/subscriptions@2024-01-01' = {
  parent: topic
  name: name
  properties: {
    lockDuration: 'PT1M'
    maxDeliveryCount: 10
    defaultMessageTimeToLive: timeToLive
    deadLetteringOnMessageExpiration: deadLetterExpired
    deadLetteringOnFilterEvaluationExceptions: true
  }
}

// The service creates a rule with this name that matches everything; this one replaces it.
resource rule 'Microsoft.ServiceBus/namespaces/topics/subscriptions/rules@2024-01-01' = {
  parent: sub
  name: '$Default'
  properties: {
    filterType: 'SqlFilter'
    sqlFilter: {
      sqlExpression: filter
    }
  }
}

resource receives 'Microsoft.Authorization/roleAssignments@2022-04-01' = [for id in receiverIds: {
  scope: sub
  name: guid(sub.id, id, dataReceiver)
  properties: {
    roleDefinitionId: dataReceiver
    principalId: id
    principalType: receiverType
  }
}]
